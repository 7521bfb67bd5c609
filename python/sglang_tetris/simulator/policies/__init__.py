"""The policies that are compared; one small class each, see `base.Policy`."""
