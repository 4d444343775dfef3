//! Tests of the vhost-user front end with a test back end in another process.

mod carrying;
mod faults;
mod half;
mod handing_over;
mod logging;
mod machine;
mod migrating;
