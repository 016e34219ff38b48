"""Tables and pictures of an experiment from its recorded trials.

No round is selected, except for the best accuracy within given uploads.
"""
