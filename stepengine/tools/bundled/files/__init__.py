"""The file tools and what they are confined by: ``Root``, path rules, atomic writes."""
