"""Simulation of programs without data: results, sweeps over chips, traces and charts."""
