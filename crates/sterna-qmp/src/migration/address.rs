//! Parses the address of a migration, as a `uri` string or in the `channels` form.

use serde_json::{Map, Value, json};
use sterna::Address;
use sterna_transport::TransportError;

use crate::error::QmpError;
use crate::server::Arguments;

/// The address in the arguments `uri` or `channels` of `migrate` or `migrate-incoming`.
pub(super) fn from_arguments(command: &str, arguments: &Map<String, Value>) -> Result<Address, QmpError> {
    match (Arguments(arguments).string("uri")?, arguments.get("channels")) {
        (Some(_), Some(_)) => Err(QmpError::generic(format!(
            "'uri' and 'channels' arguments are mutually exclusive; exactly one of the two should be present \
             in '{command}'"
        ))),
        (Some(uri), None) => from_uri(uri),
        (None, Some(channels)) => from_channels(channels),
        (None, None) => Err(QmpError::generic(format!(
            "need either 'uri' or 'channels' argument, such as {{\"uri\": \"tcp:HOST:PORT\"}}, in '{command}'"
        ))),
    }
}

/// The forms of an address that a refusal lists.
const KINDS: &str = "tcp:HOST:PORT, rdma:HOST:PORT, unix:PATH, fd:NAME or file:PATH";

/// Parses `tcp:HOST:PORT` or `rdma:HOST:PORT` (IPv6 in brackets, an empty host for any), `unix:PATH`, `fd:NAME` or
/// `file:PATH[,offset=N]`.
pub fn from_uri(uri: &str) -> Result<Address, QmpError> {
    uri.parse().map_err(|error| {
        let rule = match &error {
            TransportError::Address { rule, .. } => *rule,
            other => return QmpError::generic(other.to_string()),
        };
        QmpError::generic(match uri.split_once(':').map_or(uri, |(scheme, _)| scheme) {
            "tcp" | "rdma" | "unix" | "fd" | "file" => format!("error parsing address '{uri}': {rule}"),
            scheme @ ("exec" | "vsock") => {
                format!("'{scheme}:' migration is not supported by Sterna; use {KINDS}")
            }
            _ => format!("unknown migration protocol: {uri}; use {KINDS}"),
        })
    })
}

/// Parses the list `channels`: one channel of the type `main`, over a socket, RDMA or a file.
pub fn from_channels(channels: &Value) -> Result<Address, QmpError> {
    let list = channels.as_array().ok_or_else(|| QmpError::wrong_type("channels", "array"))?;
    let [channel] = list.as_slice() else {
        return Err(QmpError::generic("Channel list must have exactly one entry, of the type 'main'"));
    };
    let channel = Arguments(object(channel, "channels[0]")?);
    match channel.required_string("channel-type")? {
        "main" => {}
        "cpr" => return Err(QmpError::generic("Channel type 'cpr' is not supported by Sterna; use 'main'")),
        other => {
            return Err(QmpError::generic(format!(
                "Parameter 'channels[0].channel-type' does not accept value '{other}'"
            )));
        }
    }
    let address = channel.0.get("addr").ok_or_else(|| QmpError::missing("channels[0].addr"))?;
    channel.only(&["channel-type", "addr"])?;
    let address = Arguments(object(address, "channels[0].addr")?);
    match address.required_string("transport")? {
        "socket" => socket(address),
        "file" => file(address),
        "rdma" => {
            address.only(&["transport", "host", "port"])?;
            host_and_port("rdma", address)
        }
        "exec" => Err(QmpError::generic(
            "Transport 'exec' is not supported by Sterna; use 'socket', 'rdma' or 'file'",
        )),
        other => Err(QmpError::generic(format!(
            "Parameter 'channels[0].addr.transport' does not accept value '{other}'"
        ))),
    }
}

/// The address at which a destination listens, as a member of `query-migrate`: QEMU's `socket-address`, which has no
/// RDMA, or `x-sterna-address` in the form of a channel's `addr`.
pub(super) fn to_member(address: &Address) -> (&'static str, Value) {
    let socket = match address {
        Address::Tcp { host, port } => json!({"type": "inet", "host": host, "port": port.to_string()}),
        Address::Unix(path) => json!({"type": "unix", "path": path.to_string_lossy()}),
        Address::Fd(name) => json!({"type": "fd", "str": name}),
        Address::Handed(fd) => json!({"type": "fd", "str": fd.name()}),
        Address::File { path, offset } => {
            json!({"type": "file", "filename": path.to_string_lossy(), "offset": offset})
        }
        Address::Rdma { host, port } => {
            return (
                "x-sterna-address",
                json!({"transport": "rdma", "host": host, "port": port.to_string()}),
            );
        }
        // An address kind of a later engine, which QEMU does not have.
        other => json!({"type": "x-sterna", "str": other.to_string()}),
    };
    ("socket-address", json!([socket]))
}

fn file(address: Arguments<'_>) -> Result<Address, QmpError> {
    address.only(&["transport", "filename", "offset"])?;
    let path = address.required_string("filename")?;
    if path.is_empty() || path.contains('\0') {
        return Err(QmpError::generic("The file name must not be empty and must not contain NUL"));
    }
    if path.starts_with("/dev/fdset/") {
        return Err(QmpError::generic(
            "Descriptor sets (/dev/fdset) are not supported by Sterna; give the file's own path",
        ));
    }
    let offset = address.0.get("offset").ok_or_else(|| QmpError::missing("offset"))?;
    let offset = offset.as_u64().ok_or_else(|| QmpError::wrong_type("offset", "integer, not negative"))?;
    Ok(Address::File { path: path.into(), offset })
}

fn socket(address: Arguments<'_>) -> Result<Address, QmpError> {
    match address.required_string("type")? {
        "inet" => {
            // Ranges of ports and a choice of the address family are only in QEMU. Ignoring them could connect to
            // another address than the requested one.
            address.only(&["transport", "type", "host", "port"])?;
            host_and_port("tcp", address)
        }
        "unix" => {
            address.only(&["transport", "type", "path"])?;
            from_uri(&format!("unix:{}", address.required_string("path")?))
        }
        "fd" => {
            address.only(&["transport", "type", "str"])?;
            from_uri(&format!("fd:{}", address.required_string("str")?))
        }
        "vsock" => {
            Err(QmpError::generic("Socket type 'vsock' is not supported by Sterna; use inet, unix or fd"))
        }
        other => Err(QmpError::generic(format!(
            "Parameter 'channels[0].addr.type' does not accept value '{other}'"
        ))),
    }
}

/// Parses `host` and `port`, which are both strings, as in QEMU.
fn host_and_port(scheme: &str, address: Arguments<'_>) -> Result<Address, QmpError> {
    let host = address.required_string("host")?;
    let port = address.required_string("port")?;
    from_uri(&match host.contains(':') {
        true => format!("{scheme}:[{host}]:{port}"),
        false => format!("{scheme}:{host}:{port}"),
    })
}

fn object<'a>(value: &'a Value, name: &str) -> Result<&'a Map<String, Value>, QmpError> {
    value.as_object().ok_or_else(|| QmpError::wrong_type(name, "object"))
}
