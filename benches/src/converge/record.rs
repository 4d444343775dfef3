//! The figures in a file, which is whole and up to date whenever something was put there.

use std::path::PathBuf;

use serde_json::{Map, Value};
use sterna_benches::Failure;

/// Figures by name.
pub struct Record {
    file: Option<PathBuf>,
    figures: Map<String, Value>,
}

impl Record {
    /// Nothing is stored without a file.
    pub fn new(file: Option<PathBuf>) -> Self {
        Self { file, figures: Map::new() }
    }

    /// Stores `figures` in place of what had that name, and is back when it is on the disk.
    pub fn put(&mut self, name: &str, figures: Value) -> Result<(), Failure> {
        self.figures.insert(name.to_owned(), figures);
        let Some(path) = &self.file else { return Ok(()) };
        let text = serde_json::to_string(&self.figures).map_err(|error| error.to_string())?;
        let store = || {
            let mut file = std::fs::File::create(path)?;
            std::io::Write::write_all(&mut file, text.as_bytes())?;
            file.sync_data()
        };
        store().map_err(|error| format!("{}: {error}", path.display()))
    }
}
