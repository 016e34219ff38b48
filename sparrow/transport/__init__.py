"""HTTP clients: their library, proxy and certificates.

All other modules import ``httpx`` from here: ``httpx2``, its successor, if it is installed. ``connect`` makes every
client of a server. It reads the environment itself, because the libraries raise errors of many types.
"""

from .clients import Client as Client
from .clients import connect as connect
from .clients import refuse_foreign as refuse_foreign
from .library import httpx as httpx
