"""The contract between device and coordinator: messages, manifest, masks and bundles. numpy only, no torch."""
