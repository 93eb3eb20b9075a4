"""Other libraries' front doors: scripts written for them run with one import changed"""
