//! What to install when an import fails: the distribution that has a module, which often has
//! another name. Pure.
//!
//! A name is offered only if it is in the table: a module of the user's own, or a misspelt one,
//! must not lead to a package of the index that a stranger gave that name.

use crate::session::{FileNote, PythonError, SessionId, Status};

/// Modules whose distribution has another name.
const RENAMED: &[(&str, &str)] = &[
    ("Bio", "biopython"),
    ("Crypto", "pycryptodome"),
    ("Levenshtein", "levenshtein"),
    ("OpenSSL", "pyopenssl"),
    ("PIL", "pillow"),
    ("attr", "attrs"),
    ("barcode", "python-barcode"),
    ("bs4", "beautifulsoup4"),
    ("cpuinfo", "py-cpuinfo"),
    ("cv2", "opencv-python-headless"),
    ("dateutil", "python-dateutil"),
    ("distutils", "setuptools"),
    ("dns", "dnspython"),
    ("docx", "python-docx"),
    ("dotenv", "python-dotenv"),
    ("faiss", "faiss-cpu"),
    ("fitz", "pymupdf"),
    ("git", "gitpython"),
    ("github", "pygithub"),
    ("grpc", "grpcio"),
    ("imblearn", "imbalanced-learn"),
    ("jose", "python-jose"),
    ("jwt", "pyjwt"),
    ("kafka", "kafka-python"),
    ("magic", "python-magic"),
    ("mpl_toolkits", "matplotlib"),
    ("multipart", "python-multipart"),
    ("mysql", "mysql-connector-python"),
    ("nacl", "pynacl"),
    ("pdfminer", "pdfminer.six"),
    ("pkg_resources", "setuptools"),
    ("pptx", "python-pptx"),
    ("psycopg2", "psycopg2-binary"),
    ("pylab", "matplotlib"),
    ("pythonjsonlogger", "python-json-logger"),
    ("pywt", "pywavelets"),
    ("rapidjson", "python-rapidjson"),
    ("ruamel", "ruamel.yaml"),
    ("sentence_transformers", "sentence-transformers"),
    ("serial", "pyserial"),
    ("shapefile", "pyshp"),
    ("skimage", "scikit-image"),
    ("sklearn", "scikit-learn"),
    ("skopt", "scikit-optimize"),
    ("slugify", "python-slugify"),
    ("snappy", "python-snappy"),
    ("socks", "pysocks"),
    ("speech_recognition", "speechrecognition"),
    ("telegram", "python-telegram-bot"),
    ("umap", "umap-learn"),
    ("usb", "pyusb"),
    ("websocket", "websocket-client"),
    ("xdist", "pytest-xdist"),
    ("yaml", "pyyaml"),
    ("zmq", "pyzmq"),
];

/// Modules whose distribution has the same name. The index takes dashes and underscores for the
/// same.
#[rustfmt::skip]
const SAME_NAME: &[&str] = &[
    "aiohttp", "altair", "anthropic", "boto3", "bokeh", "cartopy", "catboost", "chardet", "click",
    "cryptography", "cvxpy", "cython", "dask", "datasets", "deap", "django", "docutils", "docx2txt",
    "duckdb", "einops", "emoji", "faker", "fastapi", "feedparser", "flask", "flask_sqlalchemy",
    "folium", "gensim", "geopandas", "geopy", "graphviz", "gymnasium", "h5py", "holidays",
    "html5lib", "httpx", "hypothesis", "igraph", "imageio", "ipywidgets", "jax", "jinja2", "joblib",
    "jsonschema", "keras", "langdetect", "librosa", "lightgbm", "llvmlite", "loguru", "lxml",
    "markdown", "matplotlib", "mcp", "mistune", "more_itertools", "moviepy", "mpmath", "nbformat",
    "networkx", "nltk", "numba", "numexpr", "numpy", "openai", "openpyxl", "optuna", "ortools",
    "orjson", "pandas", "pandas_datareader", "paramiko", "patsy", "pdfplumber", "peewee", "pint",
    "plotly", "polars", "prophet", "psutil", "psycopg", "pulp", "pyarrow", "pydantic", "pydub",
    "pygame", "pygments", "pymongo", "pymysql", "pyomo", "pypdf", "pyperclip", "pyproj",
    "pytesseract", "pytest", "pytz", "qrcode", "rasterio", "rdkit", "redis", "regex", "reportlab",
    "requests", "rich", "scipy", "scrapy", "seaborn", "selenium", "setuptools", "shap", "shapely",
    "simpy", "spacy", "sqlalchemy", "statsmodels", "sympy", "tabulate", "tensorflow", "textblob",
    "tiktoken", "tokenizers", "toml", "tomli", "torch", "torchaudio", "torchvision", "tornado",
    "tqdm", "transformers", "trimesh", "typer", "tzdata", "ujson", "unidecode", "urllib3",
    "uvicorn", "vega_datasets", "vtk", "wand", "websockets", "wordcloud", "xarray", "xgboost",
    "xlrd", "xlsxwriter", "xmltodict", "yfinance", "zstandard",
];

/// Returns what an execution did not find, if it ended because of that: a module's name, of one
/// word.
///
/// A missing submodule of a module that exists (`No module named 'a.b'`) is not a missing package.
pub(super) fn missing_module(status: &Status) -> Option<&str> {
    let Status::Raised(PythonError { name, message, .. }) = status else {
        return None;
    };
    if name != "ModuleNotFoundError" {
        return None;
    }
    let (module, rest) = message
        .strip_prefix("No module named '")?
        .split_once('\'')?;
    let is_module = module
        .bytes()
        .all(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
    (rest.is_empty() && is_module && !module.is_empty()).then_some(module)
}

/// Returns the distribution that has a module, if it is known.
pub(super) fn distribution(module: &str) -> Option<&'static str> {
    let renamed = RENAMED
        .iter()
        .find(|(known, _)| *known == module)
        .map(|(_, distribution)| *distribution);
    renamed.or_else(|| SAME_NAME.iter().find(|known| **known == module).copied())
}

/// Tells whether one of these files is the module, or lies in a folder that is.
pub(super) fn is_among(module: &str, files: &[FileNote]) -> bool {
    let is_it = |part: &str| part == module || part.strip_suffix(".py") == Some(module);
    files.iter().any(|file| file.path.split('/').any(is_it))
}

/// Says how to get a module.
pub(super) fn hint(module: &str, distribution: &str) -> String {
    format!(
        "`{module}` is not installed here; call install_package with \
         package_name \"{distribution}\" and run the cell again."
    )
}

/// Says that a module may be on its way.
pub(super) fn wait(module: &str, session: &SessionId) -> String {
    format!(
        "`{module}` is not installed yet: an installation in this session goes on. Call \
         check_execution with session_id \
         \"{session}\" until it has ended, and run the cell again."
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn raised(name: &str, message: &str) -> Status {
        let (name, message) = (name.to_owned(), message.to_owned());
        Status::Raised(PythonError {
            name,
            message,
            traceback: String::new(),
            line: None,
        })
    }

    #[test]
    fn the_module_that_was_not_found_is_read_from_the_error() {
        let missing =
            |name: &str, message: &str| missing_module(&raised(name, message)).map(str::to_owned);
        let not_found = "ModuleNotFoundError";
        assert_eq!(
            missing(not_found, "No module named 'cv2'").as_deref(),
            Some("cv2")
        );
        for (name, message) in [
            (not_found, "No module named 'sklearn.nothing'"),
            (not_found, "No module named 'x.y'; 'x' is not a package"),
            (not_found, "No module named 'a b'"),
            (not_found, "No module named ''"),
            (not_found, "of my own"),
            ("ImportError", "No module named 'cv2'"),
            ("ImportError", "cannot import name 'x' from 'cv2'"),
        ] {
            assert_eq!(missing(name, message), None, "{name}: {message}");
        }
        assert_eq!(missing_module(&Status::Completed), None);
    }

    #[test]
    fn a_distribution_is_named_only_if_it_is_known() {
        for (module, expected) in [
            ("cv2", "opencv-python-headless"),
            ("sklearn", "scikit-learn"),
            ("bs4", "beautifulsoup4"),
            ("yaml", "pyyaml"),
            ("PIL", "pillow"),
            ("dotenv", "python-dotenv"),
            ("fitz", "pymupdf"),
            ("tabulate", "tabulate"),
        ] {
            assert_eq!(distribution(module), Some(expected));
        }
        for unknown in ["helpers", "my_module", "SKLEARN", ""] {
            assert_eq!(distribution(unknown), None, "{unknown:?}");
        }
    }

    #[test]
    fn a_module_of_the_users_own_is_known_by_its_file_or_folder() {
        let files = |path: &str| {
            [FileNote {
                path: path.to_owned(),
                size: 1,
            }]
        };
        for own in [
            "regex.py",
            "lib/regex.py",
            "regex/__init__.py",
            "src/regex/core.py",
        ] {
            assert!(is_among("regex", &files(own)), "{own}");
        }
        for other in ["regex.csv", "my_regex.py", "regex.pyc", "data/notes.txt"] {
            assert!(!is_among("regex", &files(other)), "{other}");
        }
    }

    #[test]
    fn each_module_is_listed_once() {
        let mut modules = RENAMED
            .iter()
            .map(|(module, _)| *module)
            .chain(SAME_NAME.iter().copied())
            .collect::<Vec<_>>();
        let all = modules.len();
        modules.sort_unstable();
        modules.dedup();
        assert_eq!(modules.len(), all);
    }
}
