//! The vhost-user front end with a back end of our own in another process.

mod carrying;
mod faults;
mod half;
mod handing_over;
mod logging;
mod machine;
mod migrating;
