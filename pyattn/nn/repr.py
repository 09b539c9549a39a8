"""The arguments that a module's ``repr`` shows besides its submodules."""


def described(**values: object) -> str:
    """``name=value`` of those that are not None, for ``extra_repr``.

    >>> described(num_heads=4, num_heads_kv=None, window=(3, 0))
    'num_heads=4, window=(3, 0)'
    """
    return ", ".join(f"{name}={value!r}" for name, value in values.items() if value is not None)
