"""The bridge between two modules that share their ranks and not their layout, such as an encoder and a language model.

`Grid` says which rank is where in a module's layout, `GridGroups` has the groups, `connect` builds the `Bridge` that
takes activations across and brings gradients back. Underneath lies `Crossing`: rows by token number, from whoever
holds them to whoever wants them, for layouts and packings of any kind.
"""

from __future__ import annotations

from workbench.sharding.bridge.connect import Bridge as Bridge
from workbench.sharding.bridge.connect import connect as connect
from workbench.sharding.bridge.crossing import Crossing as Crossing
from workbench.sharding.bridge.grid import Grid as Grid
from workbench.sharding.bridge.groups import GridGroups as GridGroups
from workbench.sharding.bridge.pair import GridPair as GridPair
from workbench.sharding.bridge.partition import SequencePartition as SequencePartition
from workbench.sharding.bridge.sides import Share as Share
from workbench.sharding.bridge.sides import Side as Side
from workbench.sharding.bridge.sides import declare as declare
