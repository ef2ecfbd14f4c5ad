"""The colours of lines, points and bars.

After Okabe and Ito (2008), which colour-blind readers tell apart, with brown in the place of yellow, which does not show on white.
"""

VERMILLION, ORANGE, BROWN, PURPLE = "#D55E00", "#E69F00", "#8B4513", "#CC79A7"
BLUE, SKY, GREEN, BLACK = "#0072B2", "#56B4E9", "#009E73", "#000000"
INK, GREY = "#222222", "#7A869A"
