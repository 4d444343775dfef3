//! The version in the server's greeting.

use serde_json::Value;

/// The version of QEMU whose protocol the server uses: major, minor, micro.
pub const QEMU_VERSION: (u32, u32, u32) = (11, 1, 3);

/// The `version` member of the greeting, and the answer to `query-version`.
pub fn version() -> Value {
    let (major, minor, micro) = QEMU_VERSION;
    serde_json::json!({
        "qemu": {"major": major, "minor": minor, "micro": micro},
        "package": concat!("Sterna ", env!("CARGO_PKG_VERSION")),
    })
}
