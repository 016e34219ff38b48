"""Every request and response of the HTTP contract, version 1, by area.

    federations   creation, changes, descriptions
    devices       enrolment, changes, descriptions
    work          assignments, and their outcomes
    reports       devices' costs, training, evaluations
    records       rounds, for observers
    tokens        operators' tokens, and invitations

Messages check themselves on creation. Answers ignore unknown fields, because one side may be newer; requests refuse
them, so that misspelt settings are reported.
"""

from .devices import *
from .federations import *
from .records import *
from .reports import *
from .tokens import *
from .work import *
