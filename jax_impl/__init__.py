"""jax_impl."""
