"""
A miss is the error that vcrpy's tests expect where nothing recorded fits.
"""

from stepengine.testing.cassette_misses import CassetteMiss as CannotOverwriteExistingCassetteException

__all__ = ("CannotOverwriteExistingCassetteException",)
