"""`Lapwing`, a callback of the Lightning trainer; pip install lapwing[lightning]"""

from lapwing.integrations.lightning import Lapwing, load

__all__ = ["Lapwing", "load"]
