//! A process that ends without dropping its values removes its staging files.
//!
//! The test is a program of its own, because it removes the staging files of all tests in the process.

use std::path::Path;

use sterna_transport::{CreateOptions, PageFile};

#[test]
fn remove_staging_files_leaves_nothing_but_what_is_to_be_kept() {
    let directory = tempfile::tempdir().unwrap();
    let (path, other) = (directory.path().join("image"), directory.path().join("other"));
    let file = PageFile::create(&path, CreateOptions::default()).unwrap();
    let kept = PageFile::create(&other, CreateOptions::default()).unwrap().keep();

    PageFile::remove_staging_files();

    assert_eq!(paths(directory.path()), [kept]);
    drop(file);
}

fn paths(directory: &Path) -> Vec<std::path::PathBuf> {
    std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path()).collect()
}
