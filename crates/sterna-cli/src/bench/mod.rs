//! `sterna bench`: the measurement ([`downtime`]), its VMs ([`machine`]) and their [`device`]s, a lower bound
//! ([`limit`]), and the output.

pub mod device;
pub mod downtime;
pub mod limit;
pub mod machine;
pub mod options;
pub mod picture;
pub mod sample;
pub mod table;
