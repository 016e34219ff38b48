"""Every request and response of the HTTP contract, version 1, by job.

    federations   creating, changing and describing them
    devices       enrolling, changing and describing them
    work          assignments, and what becomes of them
    reports       what devices report: costs, training, evaluations
    records       rounds, as observers get them

A model here is what crosses the wire; it checks itself when made. What one side sends, the other may not know yet, so
answers ignore unknown fields and requests refuse them: a misspelt setting must not pass in silence.
"""

from .devices import *
from .federations import *
from .records import *
from .reports import *
from .work import *
