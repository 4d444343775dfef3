//! `--tls-dir`: a directory with certificates under QEMU's names, as a replacement for `object-add`.
//!
//! | file | contents |
//! | --- | --- |
//! | `ca-cert.pem` | trusted authorities |
//! | `server-cert.pem`, `server-key.pem` | certificate of a host that receives guests |
//! | `client-cert.pem`, `client-key.pem` | certificate of a host that sends guests |

use std::path::Path;

use serde_json::{Map, Value, json};
use sterna::{Tls, TlsEndpoint};
use sterna_drive::Temporary;
use sterna_qmp::{ClientError, MigrationControl, QmpError};

use crate::exit::Stop;
use crate::monitor::Monitor;

/// The settings of a side without a monitor, with the certificates of `directory`.
pub fn of_directory(directory: &Path, endpoint: TlsEndpoint) -> Result<Tls, Stop> {
    Tls::from_directory(directory, endpoint).map_err(|error| Stop::unreadable(error.to_string()))
}

/// Gives a Sterna VM the credentials `tls-server` and `tls-client`, for which files exist.
/// Migrations use those of `endpoint`, which must exist.
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

/// Gives the VM of `monitor` credentials of its host, and makes migrations use them until `settings` are
/// restored.
pub fn give(
    monitor: &mut Monitor,
    settings: &mut Temporary,
    directory: &Path,
    endpoint: TlsEndpoint,
) -> Result<(), Stop> {
    let directory = absolute(directory)?;
    // A distinct name, because an operator may already have a `tls-client`.
    let id = format!("sterna-{}", id(endpoint));
    let added = settings.add_object(monitor.vm(), &id, object(&id, &directory, endpoint));
    added.map_err(|error| match error {
        // The refusal means that the VM could not use the files.
        ClientError::Refused { desc, .. } => {
            Stop::unreadable(format!("--tls-dir at {}: {desc}", monitor.endpoint()))
        }
        error => monitor.stop(error),
    })?;
    let mut named = Map::new();
    named.insert("tls-creds".into(), id.into());
    settings.set(monitor.vm(), &named).map_err(|error| monitor.stop(error))
}

/// Advice for a command with the option `--tls-hostname`.
pub const NAME_OPTION: &str = " (`--tls-hostname NAME`)";
/// Advice for a command that sets a VM's parameters.
pub const NAME_PARAMETER: &str = " (`--set tls-hostname=NAME`)";

/// The advice `option`, if `why` is an error about a missing host name.
pub fn name_advice(why: &str, option: &'static str) -> &'static str {
    if why.contains("the expected host name") && !why.contains("tls-hostname") { option } else { "" }
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

/// An absolute path, because the VM may have another working directory.
fn absolute(directory: &Path) -> Result<std::path::PathBuf, Stop> {
    std::path::absolute(directory).map_err(|error| Stop::failed(format!("{}: {error}", directory.display())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrong_name_points_to_the_option_once_and_nothing_else_does() {
        let asks = "it is for a, not for b: set the expected host name to that";

        assert_eq!(name_advice(asks, NAME_OPTION), NAME_OPTION);
        assert_eq!(name_advice(&format!("{asks}{NAME_PARAMETER}"), NAME_OPTION), "");
        assert_eq!(name_advice("it has expired; renew it", NAME_OPTION), "");
    }
}
