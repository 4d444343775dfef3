//! versitygw, an S3 server that checks signatures, checksums and conditions. Tests of `sterna-s3` use it if it is there.
//!
//! It is built from the Go module proxy, which takes two minutes and 800 MB that are removed again. Therefore it is built only if
//! it is named: `cargo xtask roots versitygw`.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::{Aside, directory, said};
use crate::process::{self, Result};

/// Name of the root's directory.
pub const NAME: &str = "versitygw";
const MODULE: &str = "github.com/versity/versitygw";
const VERSION: &str = "v1.8.0";
/// The hash of the module in Go's form. The module's `go.sum` has those of all its dependencies.
const SUM: &str = "h1:au+wI+aybno/STsQiSm35Uu6Q6iK5MWReQxgO6SEMFc=";
/// A file in the root with the version that was built.
const STAMP: &str = "sterna-root";

/// Builds the server if it is not there, and returns a note with its version.
pub fn build() -> Result<String> {
    let place = directory().join(NAME);
    let note = format!("root {NAME}: {MODULE} {VERSION}");
    if std::fs::read_to_string(place.join(STAMP)).is_ok_and(|stamp| stamp == SUM) {
        return Ok(note);
    }
    if !process::installed("go") {
        return Err("it needs Go 1.24 or later".to_owned());
    }
    std::fs::create_dir_all(place.parent().unwrap_or(&place)).map_err(|e| said(&place, &e))?;
    let (aside, work) = (Aside::beside(&place)?, Aside::beside(&place.with_file_name("versitygw-work"))?);
    std::fs::create_dir_all(&aside.0).map_err(|e| said(&aside.0, &e))?;
    let source = download(&work.0)?;
    let mut compile = go(&work.0);
    compile.current_dir(source).args(["build", "-mod=readonly", "-trimpath", "-ldflags=-s -w", "-o"]);
    process::run(compile.arg(aside.0.join(NAME)).arg("./cmd/versitygw"))?;
    let stamp = aside.0.join(STAMP);
    std::fs::write(&stamp, SUM).map_err(|e| said(&stamp, &e))?;
    // An existing directory here has another version.
    if place.exists() {
        std::fs::remove_dir_all(&place).map_err(|e| said(&place, &e))?;
    }
    std::fs::rename(&aside.0, &place).map_err(|e| said(&place, &e))?;
    Ok(note)
}

/// Downloads the module's source, checks its hash, and returns its directory.
fn download(work: &Path) -> Result<PathBuf> {
    let module = format!("{MODULE}@{VERSION}");
    let text = process::output(go(work).args(["mod", "download", "-json", &module]))?;
    let answer: serde_json::Value =
        serde_json::from_str(&text).map_err(|error| format!("the answer of `go mod download`: {error}"))?;
    if answer["Sum"] != SUM {
        return Err(format!("{module} has the hash {}, not {SUM}", answer["Sum"]));
    }
    let directory = answer["Dir"].as_str().ok_or("`go mod download` named no directory")?;
    Ok(directory.into())
}

/// Go with caches of its own, which are removed afterwards.
fn go(work: &Path) -> Command {
    let mut command = Command::new("go");
    command.env("GOMODCACHE", work.join("modules")).env("GOCACHE", work.join("cache"));
    command.env("GOFLAGS", "-modcacherw").env("CGO_ENABLED", "0").current_dir("/");
    command
}
