"""The wire of Bedrock's Converse API for models of many makers; its client is in ``models/clouds.py``."""
