"""Settings for every test."""

from hypothesis import settings

# An example's time says nothing here: the first one compiles, and test machines are shared.
settings.register_profile("kimi_jax", deadline=None)
settings.load_profile("kimi_jax")
