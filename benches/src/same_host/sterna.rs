//! A move from `sterna run` to `sterna run --same-host`.

use std::path::Path;
use std::time::Instant;

use serde_json::json;
use sterna_benches::Failure;
use sterna_benches::machines::{Lab, Role};

use crate::{Move, address, begin, end};

pub(crate) fn once(lab: &Lab, bytes: u64, sector: &Path) -> Result<Move, Failure> {
    let mut source = lab.start_protected(Role::SparseSource, bytes, sector, &[])?;
    let more = ["--same-host".to_owned()];
    let mut destination = lab.start_protected(Role::FreshDestination, bytes, sector, &more)?;
    destination.execute("cont", serde_json::Value::Null)?;
    let uri = address(destination.directory(), "guest");
    destination.execute("migrate-incoming", json!({ "uri": uri }))?;
    let words = begin(&mut source)?;
    let began = Instant::now();
    source.execute("migrate", json!({ "uri": uri }))?;
    end(began, &mut source, || Ok(destination), &words)
}
