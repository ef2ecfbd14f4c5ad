"""The one kind of error a user meets: where, what was found, what was expected, what to do next."""


class QATError(ValueError):
    """Bad input, said in one line.

    Args:
        where: qualified layer name, config key or path at fault.
        found: what stands there.
        expected: what would have been accepted.
        todo: the next step for the user.
    """

    def __init__(self, where: str, found: str, expected: str, todo: str):
        self.where, self.found, self.expected, self.todo = where, found, expected, todo
        super().__init__(f"{where}: found {found}; expected {expected}. {todo}")

    def __reduce__(self):
        return type(self), (self.where, self.found, self.expected, self.todo)


class CaptureError(QATError):
    """A model whose forward cannot be captured as one graph."""


class ConfigError(QATError):
    """A recipe, override, data folder or checkpoint that cannot be used."""
