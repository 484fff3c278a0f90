"""Machines that no test has, for programs that run here."""

import dataclasses

import rlfx

_CPU, _GPU = rlfx.target("cpu"), rlfx.target("h200")
#: A machine of this process with the rewrites of a GPU.
AS_A_GPU = dataclasses.replace(
    _CPU, rates=_GPU.rates, rewrites=_GPU.rewrites, room=dataclasses.replace(_GPU.room, memory=None)
)
