"""An extension of Google's Model Explorer that opens IR and compiled programs.

pip install 'npu-simulation[model-explorer]'
model-explorer --extensions=npu_sim.model_explorer net.npubin
"""
