"""Gates that choose the blocks of a model for each batch (pFedGate)."""
