//! `sterna bench`: what is measured ([`downtime`]), between which VMs ([`machine`], with [`device`]s in them), what
//! nothing can be faster than ([`limit`]), and how it is shown.

pub mod device;
pub mod downtime;
pub mod limit;
pub mod machine;
pub mod picture;
pub mod sample;
pub mod table;
