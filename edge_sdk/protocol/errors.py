"""What can be wrong with data that crosses the wire.

ProtocolError            the data breaks the contract; its text says what was met, what was wanted, what to do
├── ManifestError        a model's description is inconsistent, or does not fit the tensors beside it
└── BundleError          a bundle's bytes are not a bundle of this manifest
"""


class ProtocolError(ValueError):
    """The data breaks the contract between device and coordinator."""


class ManifestError(ProtocolError):
    """A model's description is inconsistent, or does not fit the tensors beside it."""


class BundleError(ProtocolError):
    """Bytes that are not a bundle, or not one of this manifest."""
