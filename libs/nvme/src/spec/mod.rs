//! The structures and numbers of the NVM Express Base Specification, revision 1.4.
