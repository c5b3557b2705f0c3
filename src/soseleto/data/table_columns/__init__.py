"""The columns of a table as they are: kinds, missing values, and the fitted preparation that a run keeps."""
