"""Bedrock's Converse API, one wire for models of many makers; its client is in ``models/clouds.py``."""
