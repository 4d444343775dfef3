//! `--tls-dir`: certificates under QEMU's names, for people who do not want to say `object-add`.
//!
//! | file | |
//! | --- | --- |
//! | `ca-cert.pem` | authorities that are trusted |
//! | `server-cert.pem`, `server-key.pem` | of a host that guests come to |
//! | `client-cert.pem`, `client-key.pem` | of a host that guests leave |

use std::path::Path;

use serde_json::{Map, Value, json};
use sterna::TlsEndpoint;
use sterna_qmp::{ClientError, MigrationControl, QmpError};

use crate::exit::Stop;
use crate::monitor::Monitor;

/// Gives a VM of ours both kinds of credentials, `tls-server` and `tls-client`, as far as the files are there, and
/// makes migrations use those of `endpoint`, which must be there.
pub fn host(control: &MigrationControl, directory: &Path, endpoint: TlsEndpoint) -> Result<(), Stop> {
    let refused = |error: QmpError| Stop::unreadable(error.to_string());
    let directory = absolute(directory)?;
    for kind in [TlsEndpoint::Server, TlsEndpoint::Client] {
        if kind != endpoint && !directory.join(format!("{}-cert.pem", kind.word())).exists() {
            continue;
        }
        control.add_object(&object(&id(kind), &directory, kind)).map_err(refused)?;
    }
    let mut changes = Map::new();
    changes.insert("tls-creds".into(), id(endpoint).into());
    control.set_parameters(&changes).map_err(refused)
}

/// Gives a VM behind a monitor credentials of the host that it runs on, and makes migrations use them.
pub fn give(monitor: &mut Monitor, directory: &Path, endpoint: TlsEndpoint) -> Result<(), Stop> {
    let directory = absolute(directory)?;
    // A name of our own: an operator may have a `tls-client` already.
    let id = format!("sterna-{}", id(endpoint));
    // Left from a migration of ours before; its files may have been renewed since.
    let _ = monitor.try_execute("object-del", json!({ "id": id }));
    let added = monitor.try_execute("object-add", Value::Object(object(&id, &directory, endpoint)));
    added.map_err(|error| match error {
        // It read the files.
        ClientError::Refused { desc, .. } => {
            Stop::unreadable(format!("--tls-dir at {}: {desc}", monitor.endpoint()))
        }
        error => monitor.stop(error),
    })?;
    monitor.execute("migrate-set-parameters", json!({ "tls-creds": id })).map(drop)
}

fn id(endpoint: TlsEndpoint) -> String {
    format!("tls-{}", endpoint.word())
}

fn object(id: &str, directory: &Path, endpoint: TlsEndpoint) -> Map<String, Value> {
    let members = [
        ("qom-type", json!("tls-creds-x509")),
        ("id", json!(id)),
        ("dir", json!(directory.to_string_lossy())),
        ("endpoint", json!(endpoint.word())),
        ("verify-peer", json!(true)),
    ];
    members.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
}

/// The VM may have another working directory.
fn absolute(directory: &Path) -> Result<std::path::PathBuf, Stop> {
    std::path::absolute(directory).map_err(|error| Stop::failed(format!("{}: {error}", directory.display())))
}
