"""Frozen data that the parts of akv hand to each other. No behaviour beyond checks and derived figures."""
