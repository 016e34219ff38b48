"""Every request and response of the HTTP contract, version 1, with a module for each area.

Messages check themselves on creation. Answers ignore unknown fields, because one side may be newer; requests refuse
them, so that misspelt settings are reported.
"""

from .devices import *
from .federations import *
from .records import *
from .reports import *
from .tokens import *
from .work import *
