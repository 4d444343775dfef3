//! Names of staging files.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

pub(super) const ENDING: &str = ".partial";

/// Maximum length of a file name in bytes.
pub(super) const NAME_MAX: usize = 255;

/// A staging file name for `place` that this process has not used yet.
pub(super) fn staging_name(place: &Path) -> PathBuf {
    static COUNTER: AtomicU64 = AtomicU64::new(0);
    let number = COUNTER.fetch_add(1, Ordering::Relaxed);
    place.with_file_name(format!("{}{}-{number}{ENDING}", prefix(place), std::process::id()))
}

/// Start of the names of staging files for `place`. Long names are cut, so that the suffix fits.
pub(super) fn prefix(place: &Path) -> String {
    let name = place.file_name().unwrap_or_default().to_string_lossy().into_owned();
    // Leave room for a process id, a counter and the ending.
    let mut end = name.len().min(NAME_MAX - 48);
    while !name.is_char_boundary(end) {
        end -= 1;
    }
    format!(".{}.", &name[..end])
}

pub(super) fn directory_of(place: &Path) -> &Path {
    match place.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}
