"""Projections of what fits a device, and of the speeds that it brings there, before anything is downloaded."""
