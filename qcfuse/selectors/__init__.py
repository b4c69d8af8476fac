"""Which context tokens are recomputed. One file per method; hydra instantiates them from conf/selector."""
