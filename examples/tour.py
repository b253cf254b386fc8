"""A short tour of a sandbox: text, a data frame, a plot, and a value at the end.

    cellblock run examples/tour.py

Everything below runs as an ordinary script would, in a place that cannot see the rest of the
machine.
"""

import os
import socket

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

# Printed text comes out as it is written.
print(f"Python runs as user {os.getuid()} on the host “{socket.gethostname()}”, in {os.getcwd()}.")
print(
    "Home folders of the machine that it can see:",
    [name for name in ("/home", "/root") if os.path.exists(name)] or "none",
)
try:
    socket.create_connection(("192.0.2.1", 80), timeout=1)
except OSError as error:
    print("The network, as seen from here:", error)

# A data frame: one walk per column, in steps of plus or minus one.
generator = np.random.default_rng(7)
walks = pd.DataFrame(
    generator.choice([-1, 1], size=(365, 3)).cumsum(axis=0), columns=["red", "green", "blue"]
)
print("\nThe first days:")
print(walks.head(3).to_string())

# A plot. `cellblock run` saves it as tour-1.png; an MCP client gets it as an image.
figure, axes = plt.subplots(figsize=(7, 3.5))
for name in walks:
    axes.plot(walks.index, walks[name], color=name, label=name)
axes.set(title="Three random walks", xlabel="day", ylabel="distance from home")
axes.legend()
plt.show()

# The value of the last line is shown too.
print("\nAfter a year:")
walks.describe().loc[["min", "mean", "max"]].round(1)
