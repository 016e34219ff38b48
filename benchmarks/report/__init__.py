"""Tables and pictures of the papers' figures, beside those of ``sparrow bench report``."""
