"""A second reference of every op, in JAX, written apart from the numpy one: the two must agree.

`metainfer.backends.jax.reference` needs the extra ``jax``; nothing else imports it.
"""
