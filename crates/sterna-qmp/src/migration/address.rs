//! Where a migration goes or comes from: `uri` strings and the `channels` form.

use serde_json::{Map, Value, json};
use sterna::Address;

use crate::error::QmpError;
use crate::server::Arguments;

/// The address that `migrate` or `migrate-incoming` names, by `uri` or by `channels`.
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

/// `tcp:HOST:PORT` (IPv6 in brackets, an empty host for any), `unix:PATH`, `fd:NAME` or `file:PATH[,offset=N]`.
pub fn from_uri(uri: &str) -> Result<Address, QmpError> {
    let (scheme, rest) = uri.split_once(':').unwrap_or((uri, ""));
    match scheme {
        "tcp" => tcp(rest, uri),
        "unix" => unix(rest),
        "fd" => fd(rest),
        "file" => uri.parse().map_err(|error| QmpError::generic(format!("{error}"))),
        "exec" | "rdma" | "vsock" => Err(QmpError::generic(format!(
            "'{scheme}:' migration is not supported by Sterna; use tcp:HOST:PORT, unix:PATH, fd:NAME or file:PATH"
        ))),
        _ => Err(QmpError::generic(format!(
            "unknown migration protocol: {uri}; use tcp:HOST:PORT, unix:PATH, fd:NAME or file:PATH"
        ))),
    }
}

/// The `channels` list: one channel of the type `main` over a socket or a file.
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
        transport @ ("exec" | "rdma") => Err(QmpError::generic(format!(
            "Transport '{transport}' is not supported by Sterna; use 'socket' or 'file'"
        ))),
        other => Err(QmpError::generic(format!(
            "Parameter 'channels[0].addr.transport' does not accept value '{other}'"
        ))),
    }
}

/// `address` as QEMU's `socket-address` shows it.
pub(super) fn to_json(address: &Address) -> Value {
    match address {
        Address::Tcp { host, port } => json!({"type": "inet", "host": host, "port": port.to_string()}),
        Address::Unix(path) => json!({"type": "unix", "path": path.to_string_lossy()}),
        Address::Fd(name) => json!({"type": "fd", "str": name}),
        Address::Handed(fd) => json!({"type": "fd", "str": fd.name()}),
        Address::File { path, offset } => {
            json!({"type": "file", "filename": path.to_string_lossy(), "offset": offset})
        }
        // One of a later engine, which QEMU does not have.
        other => json!({"type": "x-sterna", "str": other.to_string()}),
    }
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
            // Ranges of ports and choices of family are QEMU's own extras; leaving them out silently would
            // connect elsewhere than asked for.
            address.only(&["transport", "type", "host", "port"])?;
            let host = address.required_string("host")?;
            let port = address.required_string("port")?;
            Ok(Address::Tcp { host: host.to_owned(), port: parse_port(port)? })
        }
        "unix" => {
            address.only(&["transport", "type", "path"])?;
            unix(address.required_string("path")?)
        }
        "fd" => {
            address.only(&["transport", "type", "str"])?;
            fd(address.required_string("str")?)
        }
        "vsock" => {
            Err(QmpError::generic("Socket type 'vsock' is not supported by Sterna; use inet, unix or fd"))
        }
        other => Err(QmpError::generic(format!(
            "Parameter 'channels[0].addr.type' does not accept value '{other}'"
        ))),
    }
}

fn tcp(rest: &str, uri: &str) -> Result<Address, QmpError> {
    let malformed =
        || QmpError::generic(format!("error parsing address '{uri}'; write tcp:HOST:PORT, tcp:[IPV6]:PORT"));
    let (host, port) = match rest.strip_prefix('[') {
        Some(bracketed) => bracketed.split_once("]:").ok_or_else(malformed)?,
        None => rest.split_once(':').ok_or_else(malformed)?,
    };
    if port.contains([':', ',']) {
        return Err(malformed());
    }
    Ok(Address::Tcp { host: host.to_owned(), port: parse_port(port)? })
}

fn parse_port(text: &str) -> Result<u16, QmpError> {
    let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    text.parse().ok().filter(|_| digits).ok_or_else(|| {
        QmpError::generic(format!(
            "port '{text}' is not a number from 0 to 65535; service names are not resolved"
        ))
    })
}

fn unix(path: &str) -> Result<Address, QmpError> {
    const LONGEST: usize = 107;
    if path.is_empty() || path.len() > LONGEST || path.contains('\0') {
        return Err(QmpError::generic(format!(
            "UNIX socket path '{path}' must have 1 to {LONGEST} bytes without NUL"
        )));
    }
    Ok(Address::Unix(path.into()))
}

fn fd(name: &str) -> Result<Address, QmpError> {
    if name.is_empty() {
        return Err(QmpError::generic("fd: needs the name that 'getfd' gave a descriptor, or its number"));
    }
    Ok(Address::Fd(name.to_owned()))
}

fn object<'a>(value: &'a Value, name: &str) -> Result<&'a Map<String, Value>, QmpError> {
    value.as_object().ok_or_else(|| QmpError::wrong_type(name, "object"))
}
