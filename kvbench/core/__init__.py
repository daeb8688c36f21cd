"""The physics: model shapes, layouts, links, cost, statistics, units. Standard library only; opens no file."""
