//! Stores the results in a file that is complete and current after each write.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value};
use sterna_benches::Failure;
use sterna_benches::markdown::{self, Measured};

/// Results by name.
pub struct Record {
    file: Option<PathBuf>,
    markdown: Option<PathBuf>,
    figures: Map<String, Value>,
}

impl Record {
    /// Without a file, nothing is stored. `markdown` gets the same as rows for `benches/RESULTS.md`.
    pub fn new(file: Option<PathBuf>, markdown: Option<PathBuf>) -> Self {
        Self { file, markdown, figures: Map::new() }
    }

    /// Replaces the results of that name, and returns when they are on the disk.
    pub fn put(&mut self, name: &str, figures: Value) -> Result<(), Failure> {
        self.figures.insert(name.to_owned(), figures);
        if let Some(path) = &self.file {
            let text = serde_json::to_string(&self.figures).map_err(|error| error.to_string())?;
            store(path, &text)?;
        }
        if let Some(path) = &self.markdown {
            let rows = markdown::converge(&Value::Object(self.figures.clone()));
            store(path, &markdown::document(&Measured::now("converge"), &rows))?;
        }
        Ok(())
    }
}

fn store(path: &Path, text: &str) -> Result<(), Failure> {
    let store = || {
        let mut file = std::fs::File::create(path)?;
        std::io::Write::write_all(&mut file, text.as_bytes())?;
        file.sync_data()
    };
    store().map_err(|error| format!("{}: {error}", path.display()))
}
