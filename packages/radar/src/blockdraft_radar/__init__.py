"""Projections of which models fit a device and how fast they run there, before anything is downloaded."""
