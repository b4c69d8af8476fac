"""Engines run requests: `base.Engine` is the contract, `hf` the reference. conf/engine instantiates them."""
