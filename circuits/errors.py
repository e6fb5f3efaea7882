"""What can be wrong with a question to the library. The message is one line: what, what was expected, what to do.

CircuitError
├── NoSurface       a model without the weights, hooks or configuration that the formulas need
├── BadModel        weights that are not finite, or whose shapes do not fit together
├── NoSuchPart      a head, neuron, token, position or kind that this model does not have
└── Undefined       a quantity that this kind of model does not have, such as a positional circuit with rotary positions
"""


class CircuitError(ValueError):
    """Something the caller can put right."""


class NoSurface(CircuitError):
    """No model with TransformerLens' surface."""


class BadModel(CircuitError):
    """A model with unusable weights."""


class NoSuchPart(CircuitError):
    """A part that this model does not have."""


class Undefined(CircuitError):
    """A quantity that this model does not have."""
