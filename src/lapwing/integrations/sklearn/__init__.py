"""Networks with error bars as scikit-learn estimators."""

from lapwing.integrations.extras import needed

needed("sklearn", extra="sklearn")

from lapwing.integrations.sklearn.classifier import LapwingClassifier  # noqa: E402
from lapwing.integrations.sklearn.regressor import LapwingRegressor  # noqa: E402

__all__ = ["LapwingClassifier", "LapwingRegressor"]
