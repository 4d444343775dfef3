//! The version that the server states.

use serde_json::Value;

/// QEMU's version whose dialogue is spoken: major, minor, micro.
pub const QEMU_VERSION: (u32, u32, u32) = (11, 1, 3);

/// The `version` member of the greeting, and the answer to `query-version`.
pub fn version() -> Value {
    let (major, minor, micro) = QEMU_VERSION;
    serde_json::json!({
        "qemu": {"major": major, "minor": minor, "micro": micro},
        "package": concat!("Sterna ", env!("CARGO_PKG_VERSION")),
    })
}
