"""How modules show themselves: the arguments in a module's ``repr``, and the names in a package's ``help``."""

from collections.abc import Mapping


class PublicNames(list[str]):
    """A package's ``__all__``, in order; ``in`` leaves out its classes.

    ``help`` of a package documents every class that is ``in`` its ``__all__``, with all that it inherits: 450 lines of
    :class:`torch.nn.Module` for each of our modules. The package's own text lists them, and ``help`` of a class has it.
    """

    def __init__(self, home: Mapping[str, object]) -> None:
        names = home["__all__"]
        assert isinstance(names, list)
        super().__init__(names)
        self._classes = {name for name in names if isinstance(home[name], type)}

    def __contains__(self, name: object) -> bool:
        return name not in self._classes and super().__contains__(name)


def described(**values: object) -> str:
    """``name=value`` of those that are not None, for ``extra_repr``.

    >>> described(num_heads=4, num_heads_kv=None, window=(3, 0))
    'num_heads=4, window=(3, 0)'
    """
    return ", ".join(f"{name}={value!r}" for name, value in values.items() if value is not None)
