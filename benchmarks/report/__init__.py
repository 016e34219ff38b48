"""Tables and pictures of the papers' figures, in addition to those of ``sparrow bench report``."""
